"""What `kvscaler plan` asks of the brain, and how it shows the answer."""
