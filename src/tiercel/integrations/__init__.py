"""What other engines load: our stores behind their own interfaces."""
