"""What crosses the network: strict messages and a bounded tensor codec."""
