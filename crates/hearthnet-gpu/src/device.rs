//! Graphics cards of this machine, and one that was opened.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hearthnet_files::blocks::WeightType;
use parking_lot::Mutex;

use crate::buffers::Buffer;
use crate::error::GpuError;
use crate::kernels::{Arithmetic, Kernel, Route, Tile, Way};
use crate::pipelines::{Compiler, Pipeline, now};

/// Waits for a driver end after this time. A driver's own watchdog ends a kernel within 2 to 10 s.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Dispatches of a submission, at most; their parameters are one buffer.
pub(crate) const DISPATCHES: u32 = 4096;

/// Buffers are refused beyond this part of the memory that the driver offers to this process.
const BUDGET_PERCENT: u8 = 90;

/// Facts about a card, as its driver states them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterFacts {
    /// Place among the cards of this machine ([`crate::adapters`]).
    pub index: usize,
    pub name: String,
    /// Name and version of the driver.
    pub driver: String,
    /// `vulkan`, `metal` or `dx12`.
    pub backend: String,
    pub kind: Kind,
    /// Words of the largest buffer that a kernel can use.
    pub max_binding_words: u64,
}

/// Kind of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    Discrete,
    /// Shares the processor's memory.
    Integrated,
    Virtual,
    Unknown,
    /// The processor itself: a driver in software.
    Software,
}

/// Choice of the card that [`Gpu::open`] opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A discrete card, else an integrated one; never a driver in software.
    Auto,
    /// The card of this [`AdapterFacts::index`].
    Index(usize),
    /// A driver in software, for tests.
    Software,
}

pub(crate) fn all_adapters() -> Vec<wgpu::Adapter> {
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        // Without the layers that check calls in development builds.
        flags: wgpu::InstanceFlags::empty(),
        // Beyond it, some drivers would take the memory of the machine instead of the card's.
        memory_budget_thresholds: wgpu::MemoryBudgetThresholds {
            for_resource_creation: Some(BUDGET_PERCENT),
            for_device_loss: None,
        },
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let mut found = now(instance.enumerate_adapters(backends)).unwrap_or_default();
    // On Windows a card has two drivers. DirectX's may compute fma with two roundings.
    let vulkan: Vec<_> = found.iter().map(wgpu::Adapter::get_info).collect();
    let by_vulkan = |info: &wgpu::AdapterInfo| {
        let same = |v: &wgpu::AdapterInfo| (v.vendor, v.device) == (info.vendor, info.device);
        let mut vulkan = vulkan.iter().filter(|v| v.backend == wgpu::Backend::Vulkan);
        vulkan.any(same)
    };
    found.retain(|adapter| {
        let info = adapter.get_info();
        info.backend == wgpu::Backend::Vulkan || !by_vulkan(&info)
    });
    found
}

pub(crate) fn facts(index: usize, adapter: &wgpu::Adapter) -> AdapterFacts {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let binding = limits.max_storage_buffer_binding_size;
    AdapterFacts {
        index,
        name: info.name,
        driver: format!("{} {}", info.driver, info.driver_info)
            .trim()
            .to_owned(),
        backend: info.backend.to_string().to_lowercase(),
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => Kind::Discrete,
            wgpu::DeviceType::IntegratedGpu => Kind::Integrated,
            wgpu::DeviceType::VirtualGpu => Kind::Virtual,
            wgpu::DeviceType::Cpu => Kind::Software,
            wgpu::DeviceType::Other => Kind::Unknown,
        },
        max_binding_words: binding.min(limits.max_buffer_size) / 4,
    }
}

/// An opened card. Clones share it.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) facts: AdapterFacts,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) compiler: Compiler,
    pub(crate) pipelines: Mutex<HashMap<Kernel, Arc<Pipeline>>>,
    /// Set once the self-test has chosen it.
    pub(crate) way: OnceLock<Way>,
    /// Types with which the matrix units have failed the self-test.
    pub(crate) without_tiles: Mutex<HashSet<WeightType>>,
    /// Parameters of the dispatches of a submission, [`Self::slot`] bytes apart.
    pub(crate) parameters: wgpu::Buffer,
    pub(crate) slot: u32,
    /// Bound where a kernel does not use a buffer.
    pub(crate) nothing: OnceLock<Buffer>,
    /// Number of the next buffer.
    pub(crate) next: AtomicU64,
    /// Reason of the loss.
    pub(crate) lost: Arc<OnceLock<GpuError>>,
    /// Held while parameters and commands of a step go to the queue.
    pub(crate) turn: Mutex<()>,
}

impl Gpu {
    pub fn facts(&self) -> &AdapterFacts {
        &self.shared.facts
    }

    /// Arithmetic that the self-test has chosen. A kernel in which the card differs has one that
    /// relies on the card less.
    pub fn arithmetic(&self) -> Arithmetic {
        self.way().arithmetic
    }

    /// The arithmetic, and what computes beside it, in a few words: `native`, `native, SPIR-V` or
    /// `native, tiles`. Compiles and tests a kernel of matrix units, if the card has them.
    pub fn summary(&self) -> String {
        let Way { arithmetic, route } = self.way();
        let tiles = self.tiles(WeightType::Q8_0).is_some();
        match route {
            _ if tiles => format!("{arithmetic}, tiles"),
            Route::Spirv => format!("{arithmetic}, SPIR-V"),
            Route::Wgsl => arithmetic.to_string(),
        }
    }

    /// For tests: shape of the tiles of the driver's matrix units, if it offers some that fit.
    #[doc(hidden)]
    pub fn tile(&self) -> Option<Tile> {
        self.shared.compiler.tile()
    }

    /// Way that the self-test has chosen.
    pub(crate) fn way(&self) -> Way {
        let chosen = self.shared.way.get().copied();
        chosen.unwrap_or(Way {
            arithmetic: Arithmetic::Integers,
            route: Route::Wgsl,
        })
    }

    /// Returns true if the card is lost. It does not come back.
    pub fn lost(&self) -> bool {
        self.shared.lost.get().is_some()
    }

    /// For tests: gives the card up, as if it had been removed.
    #[doc(hidden)]
    pub fn destroy(&self) {
        self.shared.device.destroy();
        self.fail(GpuError::Lost("it was given up".to_owned()));
    }

    /// # Errors
    /// The reason, if the card is lost.
    pub(crate) fn alive(&self) -> Result<(), GpuError> {
        self.shared.lost.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Records that the card is lost; returns the first reason.
    pub(crate) fn fail(&self, error: GpuError) -> GpuError {
        self.shared.lost.get_or_init(|| error).clone()
    }

    /// Waits until the card has done what was submitted.
    ///
    /// # Errors
    /// [`GpuError::Hangs`] and [`GpuError::Lost`].
    pub(crate) fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
        let waited = self.shared.device.poll(wgpu::PollType::Wait {
            submission_index: submission,
            timeout: Some(TIMEOUT),
        });
        match waited {
            Ok(_) => self.alive(),
            Err(wgpu::PollError::Timeout) => Err(self.fail(GpuError::Hangs {
                seconds: TIMEOUT.as_secs(),
            })),
            Err(error) => Err(self.fail(GpuError::Lost(error.to_string()))),
        }
    }
}
