"""What a user's state is: taken apart into named leaves, laid out, planned, and put back."""
