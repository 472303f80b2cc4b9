// SPDX-License-Identifier: Apache-2.0
//
// Fat-binary containers and the shared objects in them.
#ifndef SOFTCUDA_IMAGE_H
#define SOFTCUDA_IMAGE_H

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "failure.h"
#include "softcuda/kernel.h"

namespace softcuda {

// A variable of an image, by its offset from where the image is loaded.
struct ImageGlobal {
  std::string name;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The code of an image, not loaded anywhere.
struct Image {
  std::vector<std::byte> elf;
  std::vector<ImageGlobal> globals;
};

// Reads what the loading calls accept: a fat-binary wrapper, a container, or a bare shared object.  Fails with the
// code that the driver has for it: no code for this device, PTX (which nothing here can compile), or no image.
std::shared_ptr<const Image> read_image(const void *data);
std::shared_ptr<const Image> read_image_file(const char *path);

// An image loaded: an instance with variables of its own.
class Instance {
 public:
  explicit Instance(const Image &image);
  ~Instance();
  Instance(const Instance &) = delete;
  Instance &operator=(const Instance &) = delete;

  std::span<const KernelEntry *const> kernels() const { return {table_->begin, table_->end}; }
  uint64_t base() const { return base_; }

 private:
  int file_ = -1;
  void *object_ = nullptr;
  const ImageTable *table_ = nullptr;
  uint64_t base_ = 0;
};

}  // namespace softcuda

#endif  // SOFTCUDA_IMAGE_H
