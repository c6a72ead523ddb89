"""Models to and from Hugging Face folders."""
