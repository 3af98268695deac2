// The trampoline of JAX's calls, as XLA drives it: registration, and calls from many threads at once, good ones, failing
// ones and such that it must refuse. For the sanitizers (make sanitize).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <thread>
#include <vector>

#include "../jax/ffi.h"

struct xla_ffi_error { // XLA's own: what it received
    std::string message;
    int code;
};

static void check(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "jax_tests: %s\n", what);
    exit(1);
}

static xla_ffi_error* create_error(xla_ffi_error_args* args) {
    check(args->struct_size == sizeof *args, "an error of another size");
    return new xla_ffi_error{args->message, args->code};
}

static const xla_ffi_api API = {sizeof(xla_ffi_api), nullptr, {}, nullptr, create_error};
enum { FAILS = 1000 };

// The results are the operands plus the tag; calls with a tag from FAILS on fill the message and fail.
static int32_t answer(int64_t tag, void** operands, void** results, char* message) {
    if (tag >= FAILS) {
        memset(message, 'x', PA_JAX_MESSAGE_NBYTES - 1);
        message[PA_JAX_MESSAGE_NBYTES - 1] = 0;
        return 1;
    }
    for (int at = 0; at < 2; at++) *static_cast<float*>(results[at]) = *static_cast<float*>(operands[at]) + (float)tag;
    return 0;
}

// One call as XLA lays it out: two operands, two results, and attributes of which one is the tag.
struct Call {
    float values[4] = {1, 2, 0, 0};
    int64_t tag, other = 7;
    xla_ffi_buffer buffers[4];
    xla_ffi_buffer* pointers[4];
    int types[2] = {1, 1}, kinds[2] = {XLA_FFI_ATTRIBUTE_SCALAR, XLA_FFI_ATTRIBUTE_SCALAR};
    xla_ffi_span names[2] = {{"tap", 3}, {"tag", 3}};
    xla_ffi_span* name_pointers[2] = {&names[0], &names[1]};
    xla_ffi_scalar scalars[2] = {{XLA_FFI_S64, &other}, {XLA_FFI_S64, &tag}};
    void* attribute_pointers[2] = {&scalars[0], &scalars[1]};
    xla_ffi_frame frame{};

    explicit Call(int64_t number) : tag(number) {
        for (int at = 0; at < 4; at++) {
            buffers[at] = {sizeof(xla_ffi_buffer), nullptr, 11, &values[at], 0, nullptr};
            pointers[at] = &buffers[at];
        }
        frame.struct_size = sizeof frame;
        frame.api = &API;
        frame.stage = XLA_FFI_STAGE_EXECUTE;
        frame.arguments = {sizeof(xla_ffi_buffers), nullptr, 2, types, pointers};
        frame.results = {sizeof(xla_ffi_buffers), nullptr, 2, types, pointers + 2};
        frame.attributes = {sizeof(xla_ffi_attributes), nullptr, 2, kinds, name_pointers, attribute_pointers};
    }

    // The code of the error, whose message begins so; 0 for none.
    int run(const char* message = "") {
        xla_ffi_error* const error = pa_jax_handler(&frame);
        if (!error) return 0;
        const int code = error->code;
        check(error->message.rfind(message, 0) == 0, error->message.c_str());
        delete error;
        return code;
    }
};

static void use(int64_t base) {
    for (int64_t i = 0; i < 200; i++) {
        Call good(base + i);
        check(good.run() == 0, "a call failed");
        check(good.values[2] == 1.0f + base + i && good.values[3] == 2.0f + base + i, "other results");
        check(Call(FAILS + i).run("xxx") == XLA_FFI_ABORTED, "a failure was not told");
    }
}

static void register_handler() {
    xla_ffi_metadata metadata = {sizeof metadata, {}, 99};
    xla_ffi_metadata_extension extension = {{sizeof extension, XLA_FFI_METADATA, nullptr}, &metadata};
    xla_ffi_frame frame{}; // of a registration: without an api
    frame.struct_size = sizeof frame;
    frame.extensions = &extension.base;
    check(!pa_jax_handler(&frame), "the registration failed");
    check(metadata.api_version.major == XLA_FFI_MAJOR && metadata.api_version.minor == XLA_FFI_MINOR, "no version");
    check(metadata.traits == 0, "it claims traits");
}

static void refuse_what_is_not_understood() {
    const char* const unknown = "polyaccel does not understand";
    for (int what = 0; what < 7; what++) {
        Call call(1);
        if (what == 0) call.frame.struct_size = 8;
        if (what == 1) call.frame.arguments.struct_size = 8;
        if (what == 2) call.frame.results.struct_size = 8;
        if (what == 3) call.buffers[3].struct_size = 8;
        if (what == 4) call.frame.attributes.struct_size = 8;
        if (what == 5) call.scalars[1].dtype = XLA_FFI_S64 + 1;
        if (what == 6) call.frame.attributes.count = 1; // and the tag is the second
        check(call.run(unknown) == XLA_FFI_INTERNAL, "what it cannot know was taken");
    }
    Call early(1);
    early.frame.stage = XLA_FFI_STAGE_EXECUTE - 1;
    check(early.run() == 0 && early.values[2] == 0, "it ran before its time");
}

int main() {
    register_handler();
    check(Call(1).run("polyaccel was not asked") == XLA_FFI_INTERNAL, "a call that nobody answers");
    pa_jax_set_callback(answer);
    refuse_what_is_not_understood();
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < 4; i++) threads.emplace_back(use, i * 200);
    for (std::thread& thread : threads) thread.join();
    puts("jax_tests: ok");
    return 0;
}
