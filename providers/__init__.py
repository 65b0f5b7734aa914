"""The kernel families prefetchd knows, found through the entry points `prefetchd.providers`."""
