#pragma once
#import <Foundation/Foundation.h>

@interface NSError ()
+ (instancetype)errorInDomain:(NSString*)domain code:(NSInteger)code text:(NSString*)text;
@end
