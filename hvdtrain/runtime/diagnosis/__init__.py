"""Is everything here that training on many processes needs? One function per check, each tried for real."""
