"""One model on several processes, and several engines behind one door."""
