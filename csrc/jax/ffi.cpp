#include "ffi.h"

#include <string.h>

#include <atomic>
#include <vector>

namespace {

std::atomic<pa_jax_callback> the_callback{nullptr};

xla_ffi_error* failed(const xla_ffi_frame* frame, int code, const char* message) {
    xla_ffi_error_args args = {sizeof args, nullptr, message, code};
    return frame->api->create_error(&args);
}

bool collect(const xla_ffi_buffers& given, std::vector<void*>* addresses) {
    if (given.struct_size < sizeof given) return false;
    for (int64_t at = 0; at < given.count; at++) {
        if (given.buffers[at]->struct_size < sizeof(xla_ffi_buffer)) return false;
        addresses->push_back(given.buffers[at]->data);
    }
    return true;
}

bool find_tag(const xla_ffi_attributes& given, int64_t* tag) {
    if (given.struct_size < sizeof given) return false;
    for (int64_t at = 0; at < given.count; at++) {
        const xla_ffi_span* name = given.names[at];
        if (name->length != 3 || memcmp(name->text, "tag", 3) || given.types[at] != XLA_FFI_ATTRIBUTE_SCALAR) continue;
        const auto* scalar = static_cast<const xla_ffi_scalar*>(given.values[at]);
        if (scalar->dtype != XLA_FFI_S64) continue;
        *tag = *static_cast<const int64_t*>(scalar->value);
        return true;
    }
    return false;
}

} // namespace

void pa_jax_set_callback(pa_jax_callback callback) { the_callback = callback; }

xla_ffi_error* pa_jax_handler(xla_ffi_frame* frame) {
    xla_ffi_extension* asked = frame->extensions;
    if (asked && asked->type == XLA_FFI_METADATA) { // at registration: what this was compiled for
        xla_ffi_metadata* metadata = reinterpret_cast<xla_ffi_metadata_extension*>(asked)->metadata;
        metadata->api_version = {sizeof(xla_ffi_version), nullptr, XLA_FFI_MAJOR, XLA_FFI_MINOR};
        metadata->traits = 0;
        return nullptr;
    }
    if (frame->stage != XLA_FFI_STAGE_EXECUTE) return nullptr;
    std::vector<void*> operands, results;
    int64_t tag = 0;
    const pa_jax_callback callback = the_callback;
    if (frame->struct_size < offsetof(xla_ffi_frame, future) || !collect(frame->arguments, &operands) ||
        !collect(frame->results, &results) || !find_tag(frame->attributes, &tag))
        return failed(frame, XLA_FFI_INTERNAL, "polyaccel does not understand this version of XLA's calls");
    if (!callback) return failed(frame, XLA_FFI_INTERNAL, "polyaccel was not asked to answer calls in this process");
    char message[PA_JAX_MESSAGE_NBYTES] = "";
    return callback(tag, operands.data(), results.data(), message) ? failed(frame, XLA_FFI_ABORTED, message) : nullptr;
}
