"""The directory: signed announcements in a Kademlia DHT."""
