"""Turns the shader into a C++ string literal: python embed.py FOLDER writes FOLDER/dflash2_metal.inc.

Metal compiles the text at the operators' first use. It has no include path there, so `#include "..."` is resolved here.
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent


def shader_source() -> str:
    """The shader as one text: dflash2.metal with its own headers in place."""

    def header(match: re.Match) -> str:
        return (HERE / match[1]).read_text(encoding="ascii")

    return re.sub(r'(?m)^#include "([\w.]+)"$', header, (HERE / "dflash2.metal").read_text(encoding="ascii"))


def embed(folder: pathlib.Path) -> pathlib.Path:
    """Writes dflash2_metal.inc into `folder` and returns the folder, which csrc/mps.mm needs on its include path."""
    folder.mkdir(parents=True, exist_ok=True)
    include = folder / "dflash2_metal.inc"
    text = f'R"METAL({shader_source()})METAL"\n'
    if not include.exists() or include.read_text(encoding="ascii") != text:
        include.write_text(text, encoding="ascii")
    return folder


if __name__ == "__main__":
    embed(pathlib.Path(sys.argv[1]))
