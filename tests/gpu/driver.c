/* A Vulkan driver for tests: Mesa's driver in software under another name, with a fault.
 *
 * Environment: DRIVER_BELOW is the path of Mesa's driver; DRIVER_FAULT one of
 *   none   | the card says that it is a discrete one
 *   small  | buffers of at most 64 MiB can be bound
 *   hangs  | the driver never lists its cards
 *   leaves | the card is gone once the file DRIVER_GONE exists
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
enum { SUCCESS = 0, TIMED_OUT = 2, DEVICE_LOST = -4 };
/* Offsets in VkPhysicalDeviceProperties, and of that in VkPhysicalDeviceProperties2. */
enum { DEVICE_TYPE = 16, DEVICE_NAME = 20, MAX_STORAGE_BUFFER_RANGE = 324, PROPERTIES = 16 };
enum { DISCRETE = 2 };

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

static void sleep_for(uint64_t nanoseconds) {
  struct timespec time = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
  nanosleep(&time, NULL);
}

static result (*wait_semaphores_below)(void *, const void *, uint64_t);
static result wait_semaphores(void *device, const void *semaphores, uint64_t timeout) {
  if (!is_gone()) return wait_semaphores_below(device, semaphores, timeout);
  if (!fault("stands")) return DEVICE_LOST;
  sleep_for(timeout);
  return TIMED_OUT;
}

static result (*wait_fences_below)(void *, uint32_t, const void *, uint32_t, uint64_t);
static result wait_fences(void *device, uint32_t count, const void *fences, uint32_t all, uint64_t timeout) {
  if (!is_gone()) return wait_fences_below(device, count, fences, all, timeout);
  if (!fault("stands")) return DEVICE_LOST;
  sleep_for(timeout);
  return TIMED_OUT;
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
