// Stands in for the CUDA header of this name, which torch's c10/cuda headers include.
#pragma once
#include "cuda_runtime_api.h"
