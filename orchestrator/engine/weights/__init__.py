"""How a checkpoint reaches the device."""
