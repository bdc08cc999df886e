"""One engine on several processes, and several engines behind one balancer."""
