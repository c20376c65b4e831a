// A build without calibration.
#include "kvant/io.hpp"

namespace kvant::io {

Result<Calibration> calibrate(std::span<const CapturedLayer>) {
  return Status(Code::unsupported,
                "calibrate: this kvant was built without calibration (KVANT_CALIBRATE=OFF, or no Eigen 3 was found); "
                "bases made by another build can be used. Install Eigen 3 and build again to make them here");
}

}  // namespace kvant::io
