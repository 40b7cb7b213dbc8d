"""The bodies of the endpoints, as clients write them."""
