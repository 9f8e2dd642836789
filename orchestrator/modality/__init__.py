"""What media cost: profilers per family, and the arithmetic of the encoder budget."""
