from phase1_kv_pool.allocator import OutOfPagesError as OutOfPagesError
from phase1_kv_pool.allocator import PageAllocator as PageAllocator
from phase1_kv_pool.allocator import PageError as PageError
from phase1_kv_pool.cache import PagedCache as PagedCache
from phase1_kv_pool.cache import PageUsage as PageUsage
from phase1_kv_pool.layout import KVLayout as KVLayout
