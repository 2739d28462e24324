"""GLM-5.2 and its bring-up shapes."""
