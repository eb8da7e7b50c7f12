// What the parts of the self-test program share.
#pragma once

#include <vector>

// Those of `asked`, or of all if it is empty, that run here. Says which, and what "auto" means.
std::vector<const char*> runnable_kernels(const std::vector<const char*>& asked);

// Every kernel of those instruction sets against the portable one, on the same random numbers: integers are equal, floats
// within what rounding allows, and a row of a product has the same bits in any company. Returns the number of failures.
int compare_with_portable(const std::vector<const char*>& names);
