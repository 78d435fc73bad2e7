"""What the serve commands of different engines have in common."""
