"""What a learner meets: labs, their grading, progress, hints, predictions, the quiz, the demo."""
