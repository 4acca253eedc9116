//! Vulkan drivers: what they offer beyond WGSL, and kernels as SPIR-V.
//!
//! The only file of this crate with unsafe code. wgpu checks neither such a module nor the extensions
//! that its device gets. So [`Offer`] has what the driver says that it has, and [`spirv()`] takes what
//! naga makes of a text that it has validated, and adds instructions that are in the offer.
#![allow(unsafe_code)]

mod spirv;
mod words;

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ash::{khr, vk};
use wgpu::hal::api::Vulkan;

pub use self::spirv::{Offer, spirv};
use crate::kernels::{Kernel, THREADS_OF_TILES, Tile};

const SHADER_FMA: &std::ffi::CStr = c"VK_KHR_shader_fma";

/// `VkPhysicalDeviceShaderFmaFeaturesKHR`, which ash does not have yet.
#[repr(C)]
struct ShaderFma {
    s_type: vk::StructureType,
    next: *mut c_void,
    float16: vk::Bool32,
    float32: vk::Bool32,
    float64: vk::Bool32,
}

impl ShaderFma {
    fn new(float32: bool) -> Self {
        Self {
            s_type: vk::StructureType::from_raw(1_000_579_000),
            next: std::ptr::null_mut(),
            float16: vk::FALSE,
            float32: float32.into(),
            float64: vk::FALSE,
        }
    }
}

/// Opens a card with everything that [`Offer`] has. `None` if it is no Vulkan card, or if the driver
/// refuses: the card can still be opened without.
pub(crate) fn open(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue, Offer)> {
    // SAFETY: the handles of the adapter are used for queries and for a device, and not destroyed.
    let card = unsafe { adapter.as_hal::<Vulkan>() }?;
    let mut descriptor = descriptor.clone();
    descriptor.required_features |= wgpu::Features::PASSTHROUGH_SHADERS;
    if !adapter.features().contains(descriptor.required_features) {
        return None;
    }
    let mut offer = offer(&card)?;
    // wgpu offers its own tiles, of floats, where the driver has what all tiles need.
    let feature = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    let fits = |tile: &Tile| {
        adapter.features().contains(feature)
            && tile.workgroup_bytes() <= adapter.limits().max_compute_workgroup_storage_size
    };
    offer.tile = offer.tile.filter(fits);
    if offer.tile.is_some() {
        descriptor.required_features |= feature;
        // SAFETY: no text of this crate uses the experimental parts of WGSL.
        descriptor.experimental_features = unsafe { wgpu::ExperimentalFeatures::enabled() };
    }
    let mut fma = ShaderFma::new(true);
    let add = |args: wgpu::hal::vulkan::CreateDeviceCallbackArgs<'_, '_, '_>| {
        if offer.fma {
            args.extensions.push(SHADER_FMA);
            fma.next = args.create_info.p_next.cast_mut();
            args.create_info.p_next = (&raw mut fma).cast();
        }
    };
    // wgpu panics if a driver refuses a feature that it has listed.
    let opened = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the features and limits are the adapter's; the extension and its feature are
        // offered, and `fma` lives until the device is created.
        unsafe {
            card.open_with_callback(
                descriptor.required_features,
                &descriptor.required_limits,
                &descriptor.memory_hints,
                Some(Box::new(add)),
            )
        }
    }));
    drop(card);
    // SAFETY: the device was created from this adapter, with the features of the descriptor.
    let (device, queue) =
        unsafe { adapter.create_device_from_hal(opened.ok()?.ok()?, &descriptor) }.ok()?;
    Some((device, queue, offer))
}

/// Asks the driver for its extensions and modes. `None` below Vulkan 1.2.
fn offer(card: &wgpu::hal::vulkan::Adapter) -> Option<Offer> {
    let (shared, known) = (card.shared_instance(), card.physical_device_capabilities());
    let (instance, device) = (shared.raw_instance(), card.raw_physical_device());
    let version = known.properties().api_version;
    if version.min(shared.instance_api_version()) < vk::API_VERSION_1_2 {
        return None;
    }
    let mut controls = vk::PhysicalDeviceFloatControlsProperties::default();
    let mut subgroups = vk::PhysicalDeviceSubgroupProperties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut controls)
        .push_next(&mut subgroups);
    // SAFETY: Vulkan 1.2 has the function and both structures.
    unsafe { instance.get_physical_device_properties2(device, &mut properties) };

    let mut bytes = vk::PhysicalDeviceShaderFloat16Int8Features::default();
    let mut robustness = vk::PhysicalDeviceRobustness2FeaturesEXT::default();
    let mut dots = vk::PhysicalDeviceShaderIntegerDotProductFeatures::default();
    let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
    let mut fma = ShaderFma::new(false);
    let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut bytes);
    if known.supports_extension(ash::ext::robustness2::NAME) {
        features = features.push_next(&mut robustness);
    }
    if version >= vk::API_VERSION_1_3
        || known.supports_extension(khr::shader_integer_dot_product::NAME)
    {
        features = features.push_next(&mut dots);
    }
    if known.supports_extension(khr::cooperative_matrix::NAME) {
        features = features.push_next(&mut matrices);
    }
    if known.supports_extension(SHADER_FMA) {
        fma.next = features.p_next;
        features.p_next = (&raw mut fma).cast();
    }
    // SAFETY: each structure in the list is one of Vulkan 1.2 or of an extension that the driver has.
    unsafe { instance.get_physical_device_features2(device, &mut features) };

    // With independent modes, one for binary32 says nothing about binary16 and binary64.
    let independent = |independence| independence != vk::ShaderFloatControlsIndependence::NONE;
    let even = controls.shader_rounding_mode_rte_float32 == vk::TRUE;
    let subnormal = controls.shader_denorm_preserve_float32 == vk::TRUE;
    // Subgroups of a workgroup must be whole.
    let whole = subgroups
        .supported_stages
        .contains(vk::ShaderStageFlags::COMPUTE)
        && subgroups.subgroup_size > 0
        && THREADS_OF_TILES.is_multiple_of(subgroups.subgroup_size);
    let tiles = whole && bytes.shader_int8 == vk::TRUE && matrices.cooperative_matrix == vk::TRUE;
    Some(Offer {
        fma: fma.float32 == vk::TRUE,
        rounds_to_even: even && independent(controls.rounding_mode_independence),
        preserves_special_values: controls.shader_signed_zero_inf_nan_preserve_float32 == vk::TRUE,
        preserves_subnormal_numbers: subnormal
            && independent(controls.denorm_behavior_independence),
        dot_products: dots.shader_integer_dot_product == vk::TRUE,
        robust: robustness.robust_buffer_access2 == vk::TRUE,
        tile: if tiles { best_tile(card) } else { None },
    })
}

/// Largest tile of signed bytes with sums of 32 bits that the kernel can use.
fn best_tile(card: &wgpu::hal::vulkan::Adapter) -> Option<Tile> {
    let (shared, device) = (card.shared_instance(), card.raw_physical_device());
    let instance = shared.raw_instance();
    let mut stages = vk::PhysicalDeviceCooperativeMatrixPropertiesKHR::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut stages);
    // SAFETY: the driver has the extension.
    unsafe { instance.get_physical_device_properties2(device, &mut properties) };
    let stages = stages.cooperative_matrix_supported_stages;
    if !stages.contains(vk::ShaderStageFlags::COMPUTE) {
        return None;
    }
    let tiles = khr::cooperative_matrix::Instance::new(shared.entry(), instance);
    // SAFETY: the driver has the extension.
    let tiles = unsafe { tiles.get_physical_device_cooperative_matrix_properties(device) };
    use vk::ComponentTypeKHR as T;
    let exact = |p: &&vk::CooperativeMatrixPropertiesKHR<'_>| {
        (p.a_type, p.b_type, p.c_type, p.result_type) == (T::SINT8, T::SINT8, T::SINT32, T::SINT32)
            && p.scope == vk::ScopeKHR::SUBGROUP
            && p.saturating_accumulation == vk::FALSE
    };
    let tiles = tiles.ok()?;
    let tiles = tiles.iter().filter(exact).map(|p| Tile {
        m: p.m_size,
        n: p.n_size,
        k: p.k_size,
    });
    tiles
        .filter(|tile| tile.fits())
        .max_by_key(|tile| tile.m * tile.n * tile.k)
}

impl Offer {
    pub(crate) fn tile(&self) -> Option<Tile> {
        self.tile
    }

    /// Module of a kernel with the text `text`, for a device that was opened with this offer.
    ///
    /// # Errors
    /// The reason, if the text cannot be compiled.
    pub(crate) fn module(
        &self,
        device: &wgpu::Device,
        kernel: Kernel,
        text: &str,
    ) -> Result<wgpu::ShaderModule, String> {
        let words = spirv(kernel, text, self)?;
        // SAFETY: the module is naga's, with instructions that the device has been opened for.
        Ok(unsafe {
            device.create_shader_module_passthrough(wgpu::ShaderModuleDescriptorPassthrough {
                label: None,
                entry_points: vec![wgpu::PassthroughShaderEntryPoint {
                    name: kernel.entry().into(),
                    // For Metal only.
                    workgroup_size: (1, 1, 1),
                }]
                .into(),
                spirv: Some(words.into()),
                ..Default::default()
            })
        })
    }
}
