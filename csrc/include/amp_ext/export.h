// Marks what a library exports: everything else stays hidden.
#pragma once

#define AMP_EXT_API __attribute__((visibility("default")))
