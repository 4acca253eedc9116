//! SPIR-V of a kernel: what naga makes of its WGSL, and what WGSL cannot say.

use std::collections::HashSet;

use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use spirv::{Capability, ExecutionMode, Op};
use wgpu::naga;

use super::words::{Instruction, Module};
use crate::kernels::{Kernel, Tile};

/// Extensions and modes beyond Vulkan 1.2 that a driver offers. A module uses no others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// `OpFmaKHR`, which is rounded once.
    pub fma: bool,
    /// Execution modes for binary32.
    pub rounds_to_even: bool,
    pub preserves_special_values: bool,
    pub preserves_subnormal_numbers: bool,
    /// Dot products of packed bytes.
    pub dot_products: bool,
    /// Reads beyond the end of a buffer are defined.
    pub robust: bool,
    /// Matrix units for signed bytes with sums of 32 bits.
    pub tile: Option<Tile>,
}

/// GLSL.std.450's number of `fma`.
const FMA: u32 = 50;
/// Operands of tiles: all components are signed.
const SIGNED: u32 = 0xf;

/// Module of a kernel with the text `text`, in the words of SPIR-V 1.5.
///
/// # Errors
/// The reason, if a text cannot be compiled.
pub fn spirv(kernel: Kernel, text: &str, offer: &Offer) -> Result<Vec<u32>, String> {
    let mut module = Module::parse(&compiled(kernel, text, offer)?).ok_or("not SPIR-V")?;
    modes(&mut module, offer);
    if let Kernel::Tiles {
        weight_type,
        tile,
        units: true,
    } = kernel
    {
        if offer.tile != Some(tile) {
            return Err("the driver has no such tiles".to_owned());
        }
        let steps = tile.steps(weight_type);
        tiles(&mut module, tile, steps).ok_or("the text has no place for tiles")?;
    }
    arithmetic(&mut module, offer);
    tidy(&mut module);
    Ok(module.words())
}

fn compiled(kernel: Kernel, text: &str, offer: &Offer) -> Result<Vec<u32>, String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|e| e.emit_to_string(text))?;
    let flags = naga::valid::ValidationFlags::all();
    let mut validator = naga::valid::Validator::new(flags, naga::valid::Capabilities::all());
    validator
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::BASIC);
    let info = validator.validate(&module).map_err(|e| e.to_string())?;
    let mut capabilities = vec![Capability::Shader, Capability::GroupNonUniform];
    if offer.dot_products {
        capabilities.extend([
            Capability::DotProduct,
            Capability::DotProductInput4x8BitPacked,
        ]);
    }
    let options = spv::Options {
        lang_version: (1, 5),
        // Names, by which `tiles` finds its place.
        flags: spv::WriterFlags::DEBUG,
        capabilities: Some(capabilities.into_iter().collect()),
        bounds_check_policies: BoundsCheckPolicies {
            index: BoundsCheckPolicy::Restrict,
            buffer: match offer.robust {
                true => BoundsCheckPolicy::Unchecked,
                false => BoundsCheckPolicy::Restrict,
            },
            ..BoundsCheckPolicies::default()
        },
        // Each kernel writes what it reads.
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        // All loops end.
        force_loop_bounding: false,
        ..spv::Options::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: kernel.entry().to_owned(),
    };
    spv::write_vec(&module, &info, &options, Some(&pipeline)).map_err(|e| e.to_string())
}

/// Removes names, and the layouts of types that no buffer has, which naga states and Vulkan forbids.
fn tidy(module: &mut Module) {
    let buffers = [
        spirv::StorageClass::Uniform as u32,
        spirv::StorageClass::StorageBuffer as u32,
    ];
    let arrays = [Op::TypeArray, Op::TypeRuntimeArray];
    // Types in buffers. A type follows those that it contains.
    let mut stored = HashSet::new();
    for one in module.code.iter().rev() {
        match one.operands[..] {
            [_, class, ty] if one.is(Op::TypePointer) && buffers.contains(&class) => {
                stored.insert(ty);
            }
            [id, ..] if one.is(Op::TypeStruct) && stored.contains(&id) => {
                stored.extend(&one.operands[1..]);
            }
            [id, ty, ..] if one.among(&arrays) && stored.contains(&id) => {
                stored.insert(ty);
            }
            _ => {}
        }
    }
    let names = [Op::Source, Op::String, Op::Name, Op::MemberName];
    let [stride, offset] = [spirv::Decoration::ArrayStride, spirv::Decoration::Offset];
    module.code.retain(|one| {
        let layout = match one.operands[..] {
            [_, decoration, _] if one.is(Op::Decorate) => decoration == stride as u32,
            [_, _, decoration, _] if one.is(Op::MemberDecorate) => decoration == offset as u32,
            _ => false,
        };
        !one.among(&names) && (!layout || stored.contains(&one.operands[0]))
    });
}

/// Adds the execution modes that the driver offers.
fn modes(module: &mut Module, offer: &Offer) {
    let entry = module.code.iter().find(|one| one.is(Op::EntryPoint));
    let Some(entry) = entry.map(|one| one.operands[1]) else {
        return;
    };
    let modes = [
        (
            offer.rounds_to_even,
            Capability::RoundingModeRTE,
            ExecutionMode::RoundingModeRTE,
        ),
        (
            offer.preserves_special_values,
            Capability::SignedZeroInfNanPreserve,
            ExecutionMode::SignedZeroInfNanPreserve,
        ),
        (
            offer.preserves_subnormal_numbers,
            Capability::DenormPreserve,
            ExecutionMode::DenormPreserve,
        ),
    ];
    for (_, capability, mode) in modes.into_iter().filter(|(offered, ..)| *offered) {
        module.capability(capability);
        let mode = Instruction::new(Op::ExecutionMode, [entry, mode as u32, 32]);
        module.insert_before(&[Op::ExecutionMode], mode);
    }
}

/// Forbids that float operations are contracted, and replaces `fma` by the one that rounds once.
fn arithmetic(module: &mut Module, offer: &Offer) {
    let mut results = Vec::new();
    let mut fused = false;
    for one in &mut module.code {
        let fma = one.is(Op::ExtInst) && one.operands[3] == FMA;
        if fma && offer.fma {
            one.op = Op::FmaKHR as u32;
            one.operands.drain(2..4);
            fused = true;
        }
        if fma || one.among(&[Op::FAdd, Op::FSub, Op::FMul, Op::FDiv, Op::FNegate]) {
            results.push(one.operands[1]);
        }
    }
    if fused {
        module.capability(Capability::FMAKHR);
        module.extension("SPV_KHR_fma");
    }
    for result in results {
        let decoration = spirv::Decoration::NoContraction as u32;
        let decorated = Instruction::new(Op::Decorate, [result, decoration]);
        module.insert_before(&[Op::Decorate, Op::MemberDecorate], decorated);
    }
}

/// Gives the function `tile` of `tiles_of_card.wgsl` its body, which multiplies by matrix units. `None`
/// if the module has no such function.
fn tiles(module: &mut Module, tile: Tile, steps: u32) -> Option<()> {
    module.capability(Capability::Int8);
    module.capability(Capability::CooperativeMatrixKHR);
    module.extension("SPV_KHR_cooperative_matrix");
    vulkan_memory(module)?;
    let [function, operands, integers] =
        ["tile", "operands", "integers"].map(|name| module.named(name));
    let (function, operands, integers) = (function?, operands?, integers?);

    let byte = module.declare(Op::TypeInt, &[8, 1]);
    let integer = module.declare(Op::TypeInt, &[32, 1]);
    let word = module.declare(Op::TypeInt, &[32, 0]);
    let [scope, m, n, k] =
        [spirv::Scope::Subgroup as u32, tile.m, tile.n, tile.k].map(|n| module.constant(n));
    // A use is its number, and so is a layout: rows of A, columns of B and of the result.
    let [zero, one, two] = [0, 1, 2].map(|n| module.constant(n));
    let matrix = Op::TypeCooperativeMatrixKHR;
    let a = module.declare(matrix, &[byte, scope, m, k, zero]);
    let b = module.declare(matrix, &[byte, scope, k, n, one]);
    let c = module.declare(matrix, &[integer, scope, m, n, two]);
    let null = module.id();
    let empty = Instruction::new(Op::ConstantNull, [c, null]);
    module.insert_before(&[Op::Function], empty);
    let storage = spirv::StorageClass::Workgroup as u32;
    let [words, sums] = [word, integer].map(|scalar| {
        let four = module.declare(Op::TypeVector, &[scalar, 4]);
        module.declare(Op::TypePointer, &[storage, four])
    });
    // In `tiles.wgsl`: vec4 of a run, and from a step to the next; those of a row of results.
    let run = module.constant(tile.run());
    let step = module.constant(32 * tile.run());
    let row = module.constant(32 / 4);
    let private = spirv::MemoryAccess::NON_PRIVATE_POINTER.bits();

    let begin = module
        .code
        .iter()
        .position(|one| one.is(Op::Function) && one.operands[1] == function)?;
    let is = |op: Op| move |one: &Instruction| one.is(op);
    let label = begin + module.code[begin..].iter().position(is(Op::Label))?;
    let end = label + module.code[label..].iter().position(is(Op::FunctionEnd))?;
    let parameters = module.code[begin + 1..label].iter();
    let parameters: Vec<u32> = parameters.map(|one| one.operands[1]).collect();
    let [mut weights, mut activations, to] = parameters[..].try_into().ok()?;

    let mut body = Vec::new();
    let mut sum = null;
    for i in 0..steps {
        if i > 0 {
            for at in [&mut weights, &mut activations] {
                let next = module.id();
                body.push(Instruction::new(Op::IAdd, [word, next, *at, step]));
                *at = next;
            }
        }
        let mut load = |ty, at, layout| {
            let [pointer, loaded] = [module.id(), module.id()];
            body.push(Instruction::new(
                Op::AccessChain,
                [words, pointer, operands, at],
            ));
            body.push(Instruction::new(
                Op::CooperativeMatrixLoadKHR,
                [ty, loaded, pointer, layout, run, private],
            ));
            loaded
        };
        let (left, right) = (load(a, weights, zero), load(b, activations, one));
        let next = module.id();
        body.push(Instruction::new(
            Op::CooperativeMatrixMulAddKHR,
            [c, next, left, right, sum, SIGNED],
        ));
        sum = next;
    }
    let pointer = module.id();
    body.push(Instruction::new(
        Op::AccessChain,
        [sums, pointer, integers, to],
    ));
    body.push(Instruction::new(
        Op::CooperativeMatrixStoreKHR,
        [pointer, sum, one, row, private],
    ));
    body.push(Instruction::new(Op::Return, []));
    module.code.splice(label + 1..end, body);
    Some(())
}

/// Puts the module under Vulkan's memory model, which tiles require: what a barrier orders takes part in
/// the order only if it is not private, and is made available and visible by the barrier.
fn vulkan_memory(module: &mut Module) -> Option<()> {
    module.capability(Capability::VulkanMemoryModel);
    let storage = spirv::StorageClass::Workgroup as u32;
    let shared = module.code.iter().filter(|one| one.is(Op::TypePointer));
    let shared = shared.filter(|one| one.operands[1] == storage);
    let types: Vec<u32> = shared.map(|one| one.operands[0]).collect();
    let pointers = [Op::Variable, Op::AccessChain, Op::FunctionParameter];
    let pointers = module.code.iter().filter(|one| one.among(&pointers));
    let pointers = pointers.filter(|one| types.contains(&one.operands[0]));
    let pointers: Vec<u32> = pointers.map(|one| one.operands[1]).collect();
    let barriers = module.code.iter().filter(|one| one.is(Op::ControlBarrier));
    let mut semantics: Vec<u32> = barriers.map(|one| one.operands[2]).collect();
    semantics.sort_unstable();
    semantics.dedup();
    let more = spirv::MemorySemantics::MAKE_AVAILABLE | spirv::MemorySemantics::MAKE_VISIBLE;
    let mut stronger = Vec::new();
    for id in semantics {
        let value = module.value(id)?;
        stronger.push((id, module.constant(value | more.bits())));
    }
    let private = spirv::MemoryAccess::NON_PRIVATE_POINTER.bits();
    for one in &mut module.code {
        let (op, operands) = (one.op, &mut one.operands);
        if op == Op::MemoryModel as u32 {
            operands[1] = spirv::MemoryModel::Vulkan as u32;
        } else if op == Op::Load as u32 && pointers.contains(&operands[2]) {
            operands.truncate(3);
            operands.push(private);
        } else if op == Op::Store as u32 && pointers.contains(&operands[0]) {
            operands.truncate(2);
            operands.push(private);
        } else if op == Op::ControlBarrier as u32 {
            let known = stronger.iter().find(|(id, _)| *id == operands[2]);
            operands[2] = known?.1;
        }
    }
    Some(())
}
