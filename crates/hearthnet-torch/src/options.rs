//! Device, number format and limits of an engine.

use hearthnet_engine::EngineOptions;
use hearthnet_files::gguf::TensorInfo;
use hearthnet_files::{BoundaryDtype, ModelFile, ModelSpec};
use tch::{Device, Kind, Tensor};

use crate::choice::{DeviceChoice, Dtype};
use crate::error::{TorchLoadError, first_line};

#[derive(Clone, Default, Debug)]
pub struct TorchOptions {
    pub device: DeviceChoice,
    /// Number format. `None`: fp32 on a processor, elsewhere the model's boundary dtype.
    pub dtype: Option<Dtype>,
    /// Threads on a processor, for the whole process, and limits of sequences.
    pub engine: EngineOptions,
}

/// Available device and number format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    pub(crate) device: Device,
    pub(crate) dtype: Dtype,
}

impl TorchOptions {
    /// Selects the device and tests that it works.
    ///
    /// # Errors
    /// [`TorchLoadError::Device`] if it does not.
    pub fn target(&self, spec: &ModelSpec) -> Result<Target, TorchLoadError> {
        let device = match self.device {
            DeviceChoice::Auto => [Device::Cuda(0), Device::Mps]
                .into_iter()
                .find(|device| probe(*device).is_ok())
                .unwrap_or(Device::Cpu),
            DeviceChoice::Cpu => Device::Cpu,
            DeviceChoice::Cuda(number) => Device::Cuda(number),
            DeviceChoice::Mps => Device::Mps,
        };
        probe(device).map_err(|error| TorchLoadError::Device {
            device: self.device,
            reason: first_line(&error),
        })?;
        let dtype = self.dtype.unwrap_or(match (device, spec.boundary) {
            (Device::Cpu, _) | (_, BoundaryDtype::F32) => Dtype::Fp32,
            (_, BoundaryDtype::F16) => Dtype::Fp16,
            (_, BoundaryDtype::Bf16) => Dtype::Bf16,
        });
        Ok(Target { device, dtype })
    }
}

/// Computes a trivial tensor on a device.
pub(crate) fn probe(device: Device) -> Result<(), tch::TchError> {
    let ones = Tensor::f_ones([8], (Kind::Float, device))?;
    ones.f_to_device(Device::Cpu).map(drop)
}

impl Target {
    /// Whether the device is not the processor, and so has memory of its own.
    pub fn is_on_card(&self) -> bool {
        self.device != Device::Cpu
    }

    /// Upper bound of the bytes of a layer's weights (biases are counted as fp32).
    pub fn layer_bytes(&self, file: &ModelFile, layer: u32) -> u64 {
        let bytes = |info: &TensorInfo| {
            let values: u64 = info.dims.iter().product();
            let dtype = match info.dims.len() {
                ..=1 => Dtype::Fp32,
                _ => self.dtype,
            };
            values.saturating_mul(dtype.bytes() as u64)
        };
        file.layer_tensors(layer).map(bytes).sum()
    }

    /// Arithmetic as in descriptors: `torch-<device>-<dtype>`.
    pub fn arithmetic(&self) -> String {
        let device = match self.device {
            Device::Cpu => "cpu",
            Device::Cuda(_) => "cuda",
            Device::Mps => "mps",
            Device::Vulkan => "vulkan",
        };
        format!("torch-{device}-{}", self.dtype)
    }
}
