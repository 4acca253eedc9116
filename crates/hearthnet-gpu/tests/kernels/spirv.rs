//! SPIR-V of the kernels, as wgpu gives it to a Vulkan driver.

use std::path::PathBuf;

use hearthnet_gpu::Arithmetic;
use hearthnet_gpu::testing::{Kernel, all, text};
use wgpu::naga;

use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};

fn name(kernel: Kernel) -> String {
    let more = match kernel {
        Kernel::Matrix {
            rows,
            paired,
            careful,
            ..
        } => {
            let paired = if paired { " paired" } else { "" };
            let careful = if careful { " careful" } else { "" };
            format!(" {rows}{paired}{careful}")
        }
        _ => String::new(),
    };
    format!("{kernel}{more}").replace(' ', "_")
}

fn spirv(kernel: Kernel, arithmetic: Arithmetic) -> Vec<u32> {
    let module = naga::front::wgsl::parse_str(&text(kernel, arithmetic)).unwrap();
    let (flags, all) = (
        naga::valid::ValidationFlags::all(),
        naga::valid::Capabilities::all(),
    );
    let mut validator = naga::valid::Validator::new(flags, all);
    let info = validator.validate(&module).unwrap();
    // As wgpu-hal sets them for a driver of Vulkan 1.3, and pipelines.rs for each pipeline.
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::empty(),
        bounds_check_policies: BoundsCheckPolicies {
            index: BoundsCheckPolicy::Restrict,
            buffer: BoundsCheckPolicy::Unchecked,
            ..BoundsCheckPolicies::default()
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        ..spv::Options::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: kernel.entry().to_owned(),
    };
    spv::write_vec(&module, &info, &options, Some(&pipeline)).unwrap()
}

/// With the environment variable `SPIRV`, writes the modules into this folder, as
/// `KERNEL.ARITHMETIC.ENTRY.spv`: `tests/gpu_code.py` looks at what a driver makes of them.
#[test]
fn every_kernel_becomes_spirv_in_every_arithmetic() {
    let folder = std::env::var_os("SPIRV").map(PathBuf::from);
    let mut names = std::collections::HashSet::new();
    for kernel in all() {
        for arithmetic in Arithmetic::FASTEST_FIRST {
            let words = spirv(kernel, arithmetic);
            assert_eq!(words[0], 0x0723_0203, "the magic number");
            let file = format!("{}.{arithmetic}.{}.spv", name(kernel), kernel.entry());
            if let Some(folder) = &folder {
                let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
                std::fs::write(folder.join(&file), bytes).unwrap();
            }
            assert!(names.insert(file), "{kernel} {arithmetic} twice");
        }
    }
}
