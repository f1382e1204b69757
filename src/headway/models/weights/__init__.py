"""The weights of a model: where files keep each one, loading them, new ones for a model that is loaded.

shapes           every weight by role, with its shape
roles            where files keep each role
load             files to arrays, for the CPU's native step
load_tensors     files to tensors of torch; `load_described` for families that are not Llama's
update           new weights for a loaded model; `update_tensors` for one of torch
fingerprint      a hash of all of them
"""
