"""The kernel families prefetchd knows, one module each; found through the entry points `prefetchd.providers`."""
