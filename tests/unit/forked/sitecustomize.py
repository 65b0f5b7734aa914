"""Makes the fake compiler known in every process that is started with this directory on PYTHONPATH."""

import prefetchd.compilers

prefetchd.compilers._CLASSES["fake"] = ("fake_forked", "FakeForked")
