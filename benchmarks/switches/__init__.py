"""What each switch gains, on against off."""
