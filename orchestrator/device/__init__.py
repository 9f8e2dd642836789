"""Hardware behind one small protocol. Only `cuda` knows torch.cuda."""
