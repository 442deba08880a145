// Mixed-precision training for LibTorch: includes all public headers.
#pragma once

#include <amp_ext/autocast.h>     // IWYU pragma: export
#include <amp_ext/checkpoint.h>   // IWYU pragma: export
#include <amp_ext/grad_scaler.h>  // IWYU pragma: export
#include <amp_ext/ops.h>          // IWYU pragma: export
#include <amp_ext/optim.h>        // IWYU pragma: export
