//! In place of `vulkan/mod.rs` on systems without Vulkan: no card is opened by it.

use crate::kernels::{Kernel, Tile};

/// Extensions of a Vulkan driver, which does not exist here.
#[derive(Debug)]
pub(crate) enum Offer {}

impl Offer {
    pub(crate) fn tile(&self) -> Option<Tile> {
        match *self {}
    }

    pub(crate) fn module(
        &self,
        _: &wgpu::Device,
        _: Kernel,
        _: &str,
    ) -> Result<wgpu::ShaderModule, String> {
        match *self {}
    }
}

pub(crate) fn open(
    _: &wgpu::Adapter,
    _: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue, Offer)> {
    None
}
