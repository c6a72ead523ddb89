"""Models out to Hugging Face folders and in from them."""
