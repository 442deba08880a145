// Lets the long names in tables be broken after an underscore, a dot, a bracket and the like.
document.addEventListener("DOMContentLoaded", () => {
  for (const name of document.querySelectorAll("table code .pre")) {
    const parts = name.textContent.split(/(?<=[_,=(/\]])(?=\w)|(?<=\.)(?=[A-Za-z])/);
    name.replaceChildren(...parts.flatMap((part) => [document.createElement("wbr"), part]).slice(1));
  }
});
