"""The native library: CPU kernels in C++, and one call for a whole decoder step. Without it torch computes."""
