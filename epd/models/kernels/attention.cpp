// Attention over the paged cache.
#include "common.h"
