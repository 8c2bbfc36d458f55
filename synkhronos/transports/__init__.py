"""How ranks are started and how bytes reach them."""
