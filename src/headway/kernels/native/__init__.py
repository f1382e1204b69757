"""The native library: kernels in C++, one call for a whole decoder step. `library` binds it; without it torch serves."""
