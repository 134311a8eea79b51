"""What holds under torchrun holds under ours: both run each scene, torchrun in the soak, and here its record stands for it."""
