"""Pages: who holds which, what each context's table says, and the tensors that hold them."""
