// kvant: attention over compressed KV caches. Include this.
#pragma once

#include "kvant/attention.hpp"
#include "kvant/cache.hpp"
#include "kvant/codec.hpp"
#include "kvant/export.hpp"
#include "kvant/io.hpp"
#include "kvant/reference.hpp"
#include "kvant/result.hpp"
#include "kvant/types.hpp"
#include "kvant/version.hpp"
