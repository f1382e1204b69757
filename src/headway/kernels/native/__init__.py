"""The native library: kernels in C++ and one call for a whole decoder step; without it torch serves."""
