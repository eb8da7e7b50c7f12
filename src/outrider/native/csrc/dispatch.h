// Which instruction sets this processor, and this operating system, offer.
#pragma once

#include "kernels.h"

// The kernels of that name if they can run here; "auto" gives the fastest that can. Null otherwise.
const Kernels* find_kernels(const char* name);
