//! Pipelines of the kernels, and their bind groups.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::bind_groups::GroupCache;
use crate::buffers::Buffer;
use crate::error::GpuError;
use crate::kernels::{Access, Arithmetic, Kernel, Route, Tile, Way, text};
use crate::vulkan::Offer;

/// Words of the parameters of a kernel, at most.
pub(crate) const PARAMETERS: usize = 16;

#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) way: Way,
    accesses: &'static [Access],
    layout: wgpu::BindGroupLayout,
}

/// Pipelines that are being tested.
pub(crate) type Trial = HashMap<Kernel, Arc<Pipeline>>;

/// Compiles kernels for one device.
#[derive(Debug)]
pub(crate) struct Compiler {
    device: wgpu::Device,
    layouts: Mutex<HashMap<&'static [Access], Layouts>>,
    pub(crate) groups: Arc<GroupCache>,
    /// Extensions of the driver for SPIR-V; `None` if it gets WGSL only.
    offer: Option<Offer>,
    /// Changes the text of each kernel: the identity, except in tests.
    alter: fn(String) -> String,
}

#[derive(Clone, Debug)]
struct Layouts {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

impl Compiler {
    pub(crate) fn new(
        device: wgpu::Device,
        offer: Option<Offer>,
        alter: fn(String) -> String,
    ) -> Self {
        Self {
            device,
            offer,
            layouts: Mutex::default(),
            groups: Arc::default(),
            alter,
        }
    }

    /// Shape of the tiles of the driver's matrix units.
    pub(crate) fn tile(&self) -> Option<Tile> {
        self.offer.as_ref()?.tile()
    }

    /// Whether a kernel can be compiled this way. On the bits, SPIR-V has nothing to say but tiles.
    pub(crate) fn can(&self, kernel: Kernel, way: Way) -> bool {
        let units = matches!(kernel, Kernel::Tiles { units: true, .. });
        match way.route {
            Route::Wgsl => !units,
            Route::Spirv => {
                self.offer.is_some() && (units || way.arithmetic != Arithmetic::Integers)
            }
        }
    }

    /// Compiles a kernel.
    ///
    /// # Errors
    /// The reason, if the driver refuses it.
    pub(crate) fn compile(&self, kernel: Kernel, way: Way) -> Result<Pipeline, String> {
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let source = (self.alter)(text(kernel, way.arithmetic));
        let module = match (&self.offer, way.route) {
            (Some(offer), Route::Spirv) => offer.module(&self.device, kernel, &source)?,
            _ => self
                .device
                .create_shader_module(wgpu::ShaderModuleDescriptor {
                    label: None,
                    source: wgpu::ShaderSource::Wgsl(source.into()),
                }),
        };
        let accesses = kernel.bindings();
        let layouts = self.layouts(accesses);
        let pipeline = self
            .device
            .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: None,
                layout: Some(&layouts.pipeline),
                module: &module,
                entry_point: Some(kernel.entry()),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Each kernel writes what it reads.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            });
        let failed = now(internal.pop()).flatten().or(now(scope.pop()).flatten());
        match failed {
            Some(error) => Err(error.to_string()),
            None => Ok(Pipeline {
                pipeline,
                way,
                accesses,
                layout: layouts.group,
            }),
        }
    }

    fn layouts(&self, accesses: &'static [Access]) -> Layouts {
        let mut layouts = self.layouts.lock();
        let new = || {
            let entry = |binding, ty| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty,
                    has_dynamic_offset: binding == 0,
                    min_binding_size: None,
                },
                count: None,
            };
            let storage = |access: &Access| wgpu::BufferBindingType::Storage {
                read_only: *access == Access::Read,
            };
            let entries: Vec<_> = std::iter::once(entry(0, wgpu::BufferBindingType::Uniform))
                .chain((1..).zip(accesses).map(|(i, a)| entry(i, storage(a))))
                .collect();
            let group = self
                .device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                    label: None,
                    entries: &entries,
                });
            let pipeline = self
                .device
                .create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                    label: None,
                    bind_group_layouts: &[Some(&group)],
                    immediate_size: 0,
                });
            Layouts { group, pipeline }
        };
        layouts.entry(accesses).or_insert_with(new).clone()
    }

    /// Bind group of a kernel's buffers, with the parameters as binding 0.
    pub(crate) fn group(
        &self,
        pipeline: &Pipeline,
        parameters: &wgpu::Buffer,
        buffers: &[&Buffer],
    ) -> wgpu::BindGroup {
        debug_assert_eq!(pipeline.accesses.len(), buffers.len());
        let ids = buffers.iter().map(|buffer| buffer.inner.id).collect();
        self.groups.find((pipeline.accesses, ids), || {
            let parameters = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: parameters,
                offset: 0,
                size: wgpu::BufferSize::new(4 * PARAMETERS as u64),
            });
            let buffers = buffers.iter().map(|b| b.inner.buffer.as_entire_binding());
            let entries: Vec<_> = (0..)
                .zip(std::iter::once(parameters).chain(buffers))
                .map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource })
                .collect();
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.layout,
                entries: &entries,
            })
        })
    }
}

/// The value of a future that is complete. Those of wgpu are, except in a browser.
pub(crate) fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

/// Checks that no scope caught an error.
pub(crate) fn none(error: Option<wgpu::Error>, bytes: u64) -> Result<(), GpuError> {
    match error {
        None => Ok(()),
        Some(wgpu::Error::OutOfMemory { .. }) => Err(GpuError::OutOfMemory { bytes }),
        Some(error) => Err(GpuError::Lost(error.to_string())),
    }
}
