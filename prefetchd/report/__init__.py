"""What shape logs tell, as one page to look at: `gathering` reads, `axis` lays out time, `page` draws."""
