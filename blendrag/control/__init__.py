"""The loading controller (CacheBlend, section 5.1): how long loading and computing would take, and which to
do."""
