/* A Vulkan driver for tests: Mesa's driver in software under another name, with a fault.
 *
 * Environment: DRIVER_BELOW is the path of Mesa's driver; DRIVER_FAULT one of
 *   none   | the card says that it is a discrete one
 *   small  | buffers of at most 64 MiB can be bound
 *   hangs  | the driver never lists its cards
 *   leaves | the card is gone once the file DRIVER_GONE exists
 *   full   | it has 96 MiB of memory of its own, beside the machine's
 *   shared | it has no memory of its own, and the machine gives it 96 MiB
 *   stands | no work is done once the file DRIVER_GONE exists, and no wait ends before its timeout
 *
 * It declares what it uses of Vulkan itself, because Vulkan's headers may not be installed. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void (*function)(void);
typedef function (*lookup)(void *, const char *);
typedef int32_t result;
enum { SUCCESS = 0, TIMED_OUT = 2, OUT_OF_DEVICE_MEMORY = -2, DEVICE_LOST = -4 };
/* Offsets in VkPhysicalDeviceProperties, and of that in VkPhysicalDeviceProperties2. */
enum { DEVICE_TYPE = 16, DEVICE_NAME = 20, MAX_STORAGE_BUFFER_RANGE = 324, PROPERTIES = 16 };
enum { DISCRETE = 2, OWN_MEMORY = 96 << 20 };

static function below(const char *name) {
  static void *driver;
  if (driver == NULL) {
    driver = dlopen(getenv("DRIVER_BELOW"), RTLD_NOW | RTLD_LOCAL);
    if (driver == NULL) abort();
  }
  return (function)dlsym(driver, name);
}

static int fault(const char *name) {
  const char *set = getenv("DRIVER_FAULT");
  return set != NULL && strcmp(set, name) == 0;
}

static int is_gone(void) {
  const char *file = getenv("DRIVER_GONE");
  return file != NULL && access(file, F_OK) == 0;
}

static void change(char *properties) {
  uint32_t type = DISCRETE, range = 64u << 20;
  memcpy(properties + DEVICE_TYPE, &type, sizeof type);
  strcpy(properties + DEVICE_NAME, "Test card");
  if (fault("small")) memcpy(properties + MAX_STORAGE_BUFFER_RANGE, &range, sizeof range);
}

static void (*properties_below)(void *, char *);
static void properties(void *card, char *out) {
  properties_below(card, out);
  change(out);
}

static void (*properties2_below)(void *, char *);
static void properties2(void *card, char *out) {
  properties2_below(card, out);
  change(out + PROPERTIES);
}

static result (*list_below)(void *, uint32_t *, void **);
static result list(void *instance, uint32_t *count, void **cards) {
  while (fault("hangs")) pause();
  if (is_gone()) {
    *count = 0;
    return SUCCESS;
  }
  return list_below(instance, count, cards);
}

static result (*submit_below)(void *, uint32_t, const void *, uint64_t);
static result submit(void *queue, uint32_t count, const void *batches, uint64_t fence) {
  if (is_gone()) return fault("stands") ? SUCCESS : DEVICE_LOST;
  return submit_below(queue, count, batches, fence);
}

/* Like a discrete card: memory type and heap 0 are its own, 1 those of the machine. */
static void split_memory(char *properties) {
  enum { DEVICE_LOCAL = 1, HOST_VISIBLE = 2, COHERENT = 4, CACHED = 8, HEAP_COUNT = 260, HEAPS = 264 };
  const uint32_t types[] = {2, DEVICE_LOCAL, 0, HOST_VISIBLE | COHERENT | CACHED, 1}, heaps = 2;
  const uint64_t host[] = {8ull << 30, 0}, own[] = {OWN_MEMORY, DEVICE_LOCAL};
  memcpy(properties, types, sizeof types);
  memcpy(properties + HEAP_COUNT, &heaps, sizeof heaps);
  memcpy(properties + HEAPS, own, sizeof own);
  memcpy(properties + HEAPS + sizeof own, host, sizeof host);
}

static void (*memory_below)(void *, char *);
static void memory(void *card, char *out) {
  memory_below(card, out);
  if (fault("full")) split_memory(out);
}

static void (*requirements_below)(void *, uint64_t, char *);
static void requirements(void *device, uint64_t buffer, char *out) {
  enum { TYPE_BITS = 16 };
  const uint32_t both = 3;
  requirements_below(device, buffer, out);
  if (fault("full")) memcpy(out + TYPE_BITS, &both, sizeof both);
}

/* Sizes of its own allocations; 0 is free. One thread allocates at a time. */
static struct { uint64_t memory, bytes; } taken[4096];
enum { PLACES = sizeof taken / sizeof *taken, ALLOCATION_SIZE = 16, MEMORY_TYPE = 24 };

static result (*allocate_below)(void *, const char *, const void *, uint64_t *);
static result allocate(void *device, const char *info, const void *callbacks, uint64_t *memory) {
  uint64_t bytes, all = 0;
  size_t place = PLACES;
  uint32_t type;
  char own[32];
  if (!fault("full") && !fault("shared")) return allocate_below(device, info, callbacks, memory);
  /* The driver below has one type. */
  memcpy(own, info, sizeof own);
  memcpy(&type, own + MEMORY_TYPE, sizeof type);
  memset(own + MEMORY_TYPE, 0, sizeof type);
  if (type != 0) return allocate_below(device, own, callbacks, memory);
  memcpy(&bytes, info + ALLOCATION_SIZE, sizeof bytes);
  for (size_t i = 0; i < PLACES; i++) {
    all += taken[i].bytes;
    if (taken[i].bytes == 0) place = i;
  }
  if (all + bytes > OWN_MEMORY) return OUT_OF_DEVICE_MEMORY;
  result done = allocate_below(device, own, callbacks, memory);
  if (done == SUCCESS && place < PLACES) {
    taken[place].memory = *memory;
    taken[place].bytes = bytes;
  }
  return done;
}

static void (*free_below)(void *, uint64_t, const void *);
static void release(void *device, uint64_t memory, const void *callbacks) {
  for (size_t i = 0; i < PLACES; i++) {
    if (taken[i].memory == memory) taken[i].memory = taken[i].bytes = 0;
  }
  free_below(device, memory, callbacks);
}

/* End of a wait for a card that is gone. */
static result wait_in_vain(uint64_t nanoseconds) {
  struct timespec time = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
  if (!fault("stands")) return DEVICE_LOST;
  nanosleep(&time, NULL);
  return TIMED_OUT;
}

static result (*wait_semaphores_below)(void *, const void *, uint64_t);
static result wait_semaphores(void *device, const void *semaphores, uint64_t timeout) {
  return is_gone() ? wait_in_vain(timeout) : wait_semaphores_below(device, semaphores, timeout);
}

static result (*wait_fences_below)(void *, uint32_t, const void *, uint32_t, uint64_t);
static result wait_fences(void *device, uint32_t count, const void *fences, uint32_t all, uint64_t timeout) {
  return is_gone() ? wait_in_vain(timeout) : wait_fences_below(device, count, fences, all, timeout);
}

static function replaced(const char *name, function found);

static lookup of_device_below;
static function of_device(void *device, const char *name) {
  return replaced(name, of_device_below(device, name));
}

/* A function of the driver below, or the one above that replaces it. */
static function replaced(const char *name, function found) {
  if (found == NULL) return NULL;
#define REPLACE(replaced, by, kept) \
  if (strcmp(name, replaced) == 0) { *(function *)&kept = found; return (function)by; }
  REPLACE("vkGetPhysicalDeviceProperties", properties, properties_below)
  REPLACE("vkGetPhysicalDeviceProperties2", properties2, properties2_below)
  REPLACE("vkGetPhysicalDeviceProperties2KHR", properties2, properties2_below)
  REPLACE("vkEnumeratePhysicalDevices", list, list_below)
  REPLACE("vkQueueSubmit", submit, submit_below)
  REPLACE("vkGetPhysicalDeviceMemoryProperties", memory, memory_below)
  REPLACE("vkGetBufferMemoryRequirements", requirements, requirements_below)
  REPLACE("vkAllocateMemory", allocate, allocate_below)
  REPLACE("vkFreeMemory", release, free_below)
  REPLACE("vkWaitSemaphores", wait_semaphores, wait_semaphores_below)
  REPLACE("vkWaitSemaphoresKHR", wait_semaphores, wait_semaphores_below)
  REPLACE("vkWaitForFences", wait_fences, wait_fences_below)
  REPLACE("vkGetDeviceProcAddr", of_device, of_device_below)
  return found;
}

/* What the loader of Vulkan asks a driver for. */
function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  return replaced(name, ((lookup)below("vk_icdGetInstanceProcAddr"))(instance, name));
}

function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  lookup found = (lookup)below("vk_icdGetPhysicalDeviceProcAddr");
  return found == NULL ? NULL : replaced(name, found(instance, name));
}

result vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  result (*negotiate)(uint32_t *) = (result(*)(uint32_t *))below("vk_icdNegotiateLoaderICDInterfaceVersion");
  return negotiate == NULL ? SUCCESS : negotiate(version);
}
