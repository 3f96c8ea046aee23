"""The loading controller (CacheBlend, section 5.1): what is loaded and what computed, by estimates."""
