"""What a network is made of. Nothing in here knows what a block or a GPT is."""
